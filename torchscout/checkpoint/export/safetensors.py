"""Writes a generation's whole tensors as safetensors files, with the optional package ``safetensors``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchscout.checkpoint.export import contents
from torchscout.checkpoint.reshard.reader import ReadPart
from torchscout.checkpoint.reshard.whole_state import WholeState, WholeTensor
from torchscout.errors import CheckpointError
from torchscout.state.dtypes import ITEM_BYTES

__all__ = ["require_package", "write"]

_FILE_BYTES = 4 << 30
"""A file is in memory while it is written."""


def require_package() -> None:
    """Raise ``CheckpointError`` if the package is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            "writing safetensors needs the package safetensors: pip install 'torchscout[safetensors]'"
        ) from error


def write(
    state: WholeState, read: ReadPart, folder: Path, *, optimizer: bool, file_bytes: int = _FILE_BYTES
) -> list[str]:
    """Write the model, and with ``optimizer`` the optimizers' state, into a folder.

    Returns what was left out, in words. Raises ``DamagedError`` if a part cannot be read intact.
    """
    model = contents.model_of(state, tied=False)
    tied = {name: saved for name, saved in state.tied.items() if saved in model}
    _write(model, read, folder, "model", tied, file_bytes)
    if not optimizer:
        return ["the optimizers' state, which --optimizer adds"]
    tensors: dict[str, WholeTensor] = {}
    values: dict[str, Any] = {}
    left_out: list[str] = []
    for path, value in contents.optimizer_of(state, read).items():
        name = ".".join(map(str, path))
        if isinstance(value, WholeTensor):
            tensors[name] = value
        elif _is_json(value):
            values[name] = value
        else:
            left_out.append(f"{name}, a {type(value).__name__}")
    _write(tensors, read, folder, "optimizer", {}, file_bytes)
    (folder / "optimizer.json").write_text(json.dumps(values, indent=2) + "\n")
    return left_out


def _write(
    tensors: Mapping[str, WholeTensor],
    read: ReadPart,
    folder: Path,
    name: str,
    more: Mapping[str, str],
    file_bytes: int,
) -> None:
    """Write one file, or several with an index as Hugging Face has them."""
    from safetensors.torch import save_file

    files = list(_files(tensors, file_bytes))
    index: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        of = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file = f"{name}{of}.safetensors"
        found = {each: contents.full(tensors[each], read) for each in names}
        save_file(found, folder / file, metadata={"format": "pt", **more})
        index |= dict.fromkeys(names, file)
    if len(files) > 1:
        size = sum(map(_bytes_of, tensors.values()))
        document = {"metadata": {"total_size": size}, "weight_map": index}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(document, indent=2) + "\n")


def _files(tensors: Mapping[str, WholeTensor], limit: int) -> Iterator[list[str]]:
    """Names for each file, in order; at least one file, and a larger tensor has its own."""
    names: list[str] = []
    size = 0
    for name, whole in tensors.items():
        if names and size + _bytes_of(whole) > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes_of(whole)
    yield names


def _bytes_of(whole: WholeTensor) -> int:
    count = ITEM_BYTES[whole.dtype]
    for size in whole.shape:
        count *= size
    return count


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
