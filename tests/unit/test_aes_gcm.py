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
    room = bytearray(len(plain) + TAG_BYTES)
    AesGcm(bytes(16), encrypts=True).encrypt(0, bytearray(plain), room)
    assert room.hex() == sealed
    data, tag = room[:-TAG_BYTES], room[-TAG_BYTES:]
    AesGcm(bytes(16), encrypts=False).decrypt(0, data, tag)
    assert data == plain


def test_one_object_serves_many_numbered_buffers():
    writer, reader = (AesGcm(b"k" * 16, encrypts=encrypts) for encrypts in (True, False))
    sealed, seen = bytearray(5000 + TAG_BYTES), set()
    for number in range(5):
        writer.encrypt(number, bytearray(b"x" * 5000), sealed)
        seen.add(bytes(sealed))
        data = sealed[:5000]
        reader.decrypt(number, data, sealed[5000:])
        assert data == b"x" * 5000
    assert len(seen) == 5, "equal buffers look different"


@pytest.mark.parametrize("place", [0, 77, 99, 100, 115])
def test_a_changed_bit_a_wrong_number_and_a_wrong_key_are_refused(place: int):
    sealed = bytearray(100 + TAG_BYTES)
    AesGcm(b"k" * 16, encrypts=True).encrypt(3, bytearray(100), sealed)
    reader, other = (AesGcm(key * 16, encrypts=False) for key in (b"k", b"j"))

    def decrypted(cipher: AesGcm, number: int) -> bytes:
        copy = bytearray(sealed)  # a failed attempt changes it
        cipher.decrypt(number, memoryview(copy)[:100], memoryview(copy)[100:])
        return bytes(copy[:100])

    sealed[place] ^= 1
    with pytest.raises(DamagedError, match="piece 3 was damaged in transit"):
        decrypted(reader, 3)
    sealed[place] ^= 1
    with pytest.raises(DamagedError, match="piece 4"):
        decrypted(reader, 4)
    with pytest.raises(DamagedError, match="piece 3"):
        decrypted(other, 3)
    assert decrypted(reader, 3) == bytes(100)
