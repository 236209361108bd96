"""ResNet-50 v1.5 on ImageNet, and ResNet-20 on small images, trained on any number of replicas."""
