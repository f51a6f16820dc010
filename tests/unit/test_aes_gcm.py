"""AES-128-GCM by libcrypto, against published test vectors, and what it refuses."""

from __future__ import annotations

import pytest

from torchscout.errors import DamagedError
from torchscout.utils.aes_gcm import TAG_BYTES, AesGcm

# McGrew and Viega, "The Galois/Counter Mode of Operation", test cases 1 and 2: all zero, nonce zero.
VECTORS = [
    (b"", "58e2fccefa7e3061367f1d57a4e7455a"),
    (bytes(16), "0388dace60b6a392f328c2b971b2fe78" + "ab6e47d42cec13bdf53a67b21257bddf"),
]


@pytest.mark.parametrize(("plain", "sealed"), VECTORS)
def test_it_computes_the_published_vectors(plain: bytes, sealed: str):
    room, data = bytearray(len(plain) + TAG_BYTES), bytearray(plain) or bytearray(1)
    AesGcm(bytes(16), encrypts=True).encrypt(0, data, len(plain), room)
    assert room.hex() == sealed


def test_one_object_serves_many_numbered_buffers():
    writer, reader = (AesGcm(b"k" * 16, encrypts=encrypts) for encrypts in (True, False))
    sealed, plain = bytearray(5000 + TAG_BYTES), bytearray(5000)
    seen = set()
    for number in range(5):
        writer.encrypt(number, bytearray(b"x" * 5000), 5000, sealed)
        seen.add(bytes(sealed))
        reader.decrypt(number, sealed, 5000, plain)
        assert plain == b"x" * 5000
    assert len(seen) == 5, "equal buffers look different"


@pytest.mark.parametrize("place", [0, 77, 99, 100, 115])
def test_a_changed_bit_a_wrong_number_and_a_wrong_key_are_refused(place: int):
    sealed, plain = bytearray(100 + TAG_BYTES), bytearray(100)
    AesGcm(b"k" * 16, encrypts=True).encrypt(3, bytearray(100), 100, sealed)
    reader = AesGcm(b"k" * 16, encrypts=False)
    sealed[place] ^= 1
    with pytest.raises(DamagedError, match="piece 3 was damaged in transit"):
        reader.decrypt(3, sealed, 100, plain)
    sealed[place] ^= 1
    with pytest.raises(DamagedError, match="piece 4"):
        reader.decrypt(4, sealed, 100, plain)
    with pytest.raises(DamagedError, match="piece 3"):
        AesGcm(b"j" * 16, encrypts=False).decrypt(3, sealed, 100, plain)
    reader.decrypt(3, sealed, 100, plain)
