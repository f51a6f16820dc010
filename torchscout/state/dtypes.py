"""Lists the dtypes whose tensors can be stored as bytes (paper, section 9). Does not import torch."""

from __future__ import annotations

__all__ = ["ITEM_BYTES"]

ITEM_BYTES = {
    "bool": 1,
    **dict.fromkeys(("uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""The size of one element in bytes, by torch's name of the dtype."""
