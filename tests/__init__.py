"""All tests. `make mutants` (tools/mutants.py) tests copies of the tree, and names the copy in SCOUT_TREE."""

import os
from pathlib import Path

if tree := os.environ.get("SCOUT_TREE"):
    import torchscout

    # The installed package would pass in place of a broken copy. Ranks whose body is in a test come by here.
    found = Path(torchscout.__file__).resolve()
    assert found.is_relative_to(Path(tree).resolve()), f"{found} is not from the tree under test, {tree}"
