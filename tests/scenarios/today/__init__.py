"""The adapters: the only modules of the tables that import torchscout."""
