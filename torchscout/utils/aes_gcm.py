"""AES-128-GCM of large buffers, by the libcrypto (OpenSSL) that Python's own ``ssl`` module uses.

The standard library offers TLS, whose records of 16 KiB cost a call each, but no cipher. A call of libcrypto
encrypts a buffer of any size at the speed of the processor's AES instructions, without the GIL.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from functools import cache
from mmap import mmap
from typing import Any

from torchscout.errors import DamagedError, ScoutError

__all__ = ["KEY_BYTES", "TAG_BYTES", "AesGcm", "load"]

KEY_BYTES = 16
TAG_BYTES = 16
_NONCE_BYTES = 12
Writable = bytearray | memoryview | mmap
"""A buffer that can be written to."""
_GET_TAG, _SET_TAG = 0x10, 0x11  # EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG


class AesGcm:
    """Encrypts or decrypts numbered buffers with one key. For one thread.

    A number must be used for one buffer only: the key is for one transfer.
    """

    def __init__(self, key: bytes, *, encrypts: bool) -> None:
        """Raises ``ScoutError`` if there is no libcrypto."""
        assert len(key) == KEY_BYTES
        self._library = load()
        kind = "Encrypt" if encrypts else "Decrypt"
        self._init, self._update, self._final = (
            getattr(self._library, f"EVP_{kind}{part}") for part in ("Init_ex", "Update", "Final_ex")
        )
        self._count = ctypes.c_int()
        self._context = ctypes.c_void_p(self._library.EVP_CIPHER_CTX_new())
        if not self._context or not self._init(
            self._context, ctypes.c_void_p(self._library.EVP_aes_128_gcm()), None, key, None
        ):
            raise ScoutError("libcrypto offers no AES-128-GCM on this machine")

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.EVP_CIPHER_CTX_free(self._context)

    def encrypt(self, number: int, plain: Writable, sealed: Writable) -> None:
        """Put the encrypted bytes of ``plain``, and then their tag, into ``sealed``, which is so long."""
        assert len(sealed) == len(plain) + TAG_BYTES
        self._run(number, plain, sealed)
        tag = _address(sealed) + len(plain)
        done = self._final(self._context, None, ctypes.byref(self._count))
        if not done or not self._library.EVP_CIPHER_CTX_ctrl(self._context, _GET_TAG, TAG_BYTES, tag):
            raise ScoutError("libcrypto could not encrypt")

    def decrypt(self, number: int, data: Writable, tag: Writable) -> None:
        """Decrypt these bytes in place. Raises ``DamagedError`` if anything differs from what was encrypted;
        they must not be used then."""
        assert len(tag) == TAG_BYTES
        self._run(number, data, data)
        if not self._library.EVP_CIPHER_CTX_ctrl(self._context, _SET_TAG, TAG_BYTES, _address(tag)):
            raise ScoutError("libcrypto could not decrypt")
        if self._final(self._context, None, ctypes.byref(self._count)) != 1:
            raise DamagedError(f"piece {number} was damaged in transit, or was not sent by this job")

    def _run(self, number: int, source: Writable, target: Writable) -> None:
        nonce = number.to_bytes(_NONCE_BYTES, "big")
        done, size = self._init(self._context, None, None, None, nonce), len(source)
        if done and size:
            count = ctypes.byref(self._count)
            done = self._update(self._context, _address(target), count, _address(source), size)
            done = done and self._count.value == size
        if not done:
            raise ScoutError("libcrypto could not process a buffer")


def _address(data: Writable) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


@cache
def load() -> Any:
    """The library; raises ``ScoutError`` if there is none."""
    for library in map(_opened, _places()):
        if library is not None:
            return library
    raise ScoutError(
        "found no libcrypto with AES-GCM, neither with this Python's ssl module nor in the system: "
        "install OpenSSL (libssl3 or openssl-libs)"
    )


def _places() -> list[str]:
    # A symbol is also looked up in the libraries that the module depends on.
    module = importlib.util.find_spec("_ssl")
    found = [None if module is None else module.origin, ctypes.util.find_library("crypto")]
    return [each for each in found if each is not None and each != "built-in"]


def _opened(name: str) -> Any:
    try:
        return _declared(ctypes.CDLL(name))
    except (OSError, AttributeError):  # it is not there, or has other functions
        return None


def _declared(library: Any) -> Any:
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.EVP_CIPHER_CTX_new.restype = library.EVP_aes_128_gcm.restype = pointer
    library.EVP_CIPHER_CTX_free.argtypes = [pointer]
    library.EVP_CIPHER_CTX_ctrl.argtypes = [pointer, integer, integer, pointer]
    counted = ctypes.POINTER(integer)
    for kind in ("Encrypt", "Decrypt"):
        getattr(library, f"EVP_{kind}Init_ex").argtypes = [pointer] * 3 + [ctypes.c_char_p] * 2
        getattr(library, f"EVP_{kind}Update").argtypes = [pointer, pointer, counted, pointer, integer]
        getattr(library, f"EVP_{kind}Final_ex").argtypes = [pointer, pointer, counted]
    return library
