"""Catalogs and discovery journals with parts exchanged and bits flipped: refused, or read as they are."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from tests.support.mutation import bytes_mutant, document_mutant, text_mutant, tried
from tests.support.tiled_matmul import TiledMatmul
from tests.unit.test_catalog import SHAPES, made
from torchscout.errors import CatalogError
from torchscout.experts import discovery
from torchscout.experts.catalog import document, load, save, text_of
from torchscout.experts.discovery import discover


def test_catalogs(tmp_path: Path):
    catalog = made(TiledMatmul(experts=2, uncountable=frozenset({(3, 3)})))
    whole, path = document(catalog), tmp_path / "catalog.json"
    save(catalog, path)
    saved = path.read_bytes()

    def attempt(chance: random.Random) -> None:
        kind = chance.random()
        if kind < 0.6:  # the digest is right: damage that no digest finds
            body = document_mutant(chance, whole["body"])
            digest = hashlib.sha256(canonical(body)).hexdigest()
            path.write_bytes(canonical({**whole, "digest": digest, "body": body}) + b"\n")
        else:
            path.write_bytes(text_mutant(chance, whole) if kind < 0.8 else bytes_mutant(chance, saved))
        found = load(path)
        assert text_of(found).encode() + b"\n" == path.read_bytes(), "it is not what the file says"
        for places in found.places:
            for layer in places.layers[:2]:
                if "*" not in layer and places.positions:
                    found.representatives(layer, 0)

    tried(attempt, (CatalogError,))


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def test_discovery_journals(tmp_path: Path):
    profiler = TiledMatmul(experts=2, uncountable=frozenset({(3, 3)}))
    path = tmp_path / "up.jsonl"
    found = {each.rows: each for each in discover(profiler, SHAPES, resume_from=path)}
    lines = path.read_bytes().splitlines()

    def attempt(chance: random.Random) -> None:
        mutant, place = list(lines), chance.randrange(len(lines))
        if is_sealed := chance.random() < 0.4:  # the digest is right: damage that no digest finds
            body = {name: value for name, value in json.loads(lines[place]).items() if name != "digest"}
            changed = document_mutant(chance, body)
            mutant[place] = discovery._sealed(changed) if isinstance(changed, dict) else canonical(changed)
        elif chance.random() < 0.5:
            mutant[place] = bytes_mutant(chance, mutant[place])
        else:
            mutant[place] = text_mutant(chance, json.loads(lines[place]))
        path.write_bytes(b"\n".join(mutant) + b"\n")
        seen = discovery.DiscoveryLog(path, profiler.facts()).seen
        if not is_sealed:
            assert all(found[rows] == each for rows, each in seen.items()), "damage was not found"

    tried(attempt, (CatalogError,))
