"""The folder that `scout run` adds to ``PYTHONPATH``; it holds nothing but ``sitecustomize``."""
