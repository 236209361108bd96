"""A small decoder-only language model, split over the devices of a mesh."""
