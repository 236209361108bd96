"""The tests bite: each mistake of tests/mutations.py turns one of them red."""

import pytest

from tests import mutations
from tests.mutations import MUTATIONS, REPOSITORY, Mutation, MutationError


@pytest.fixture(autouse=True)
def fresh_keras():
    """The mutated packages run in processes of their own."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_can_be_made(mutation):
    text = (REPOSITORY / "keras_replicator" / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"adapt '{mutation.name}' in tests/mutations.py"


def test_text_that_does_not_occur_once_is_an_error(tmp_path):
    path = tmp_path / "file.py"
    path.write_text("a = 1\na = 1\n")
    with pytest.raises(
        MutationError, match="'twice': its text occurs 2 times in file.py, not once"
    ):
        mutations.mutate(path, Mutation("twice", "file.py", "a = 1", "a = 2", ()))


@pytest.mark.slow
@pytest.mark.timeout(2 * mutations.TIMEOUT)
def test_green_without_mutation():
    mutations.check_green()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_noticed(mutation):
    mutations.check_red(mutation)
