"""Class-conditional SN-GAN with a projection discriminator, trained on any number of replicas."""
