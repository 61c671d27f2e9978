"""Damage to files that are read without trust: bits, lengths, fields of other types and ranges, and things that are no
files.

`every_damage` makes a series of them from the content of a good file; the tests of each reader say what must hold for
all of them.
"""

import copy
import gzip
import hashlib
import json
import math
import os
import random
import shutil

POISON = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    -1.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
]
POISON += [
    "",
    "x",
    "nothing",
    "bits",
    "int8",
    "Slots",
    "\x1b[2J",
    "\ud800",
    "\x00",
    "9" * 50,
    [],
    [0],
    [[]],
    [None],
    [[[[0]]]],
]
POISON += [
    [-1, 0],
    [0, 0],
    [0, 10**9],
    ["Slots", 2],
    ["Lengths", "turn", 10**9],
    ["Groups", [0], [1, None, 0, "turn"]],
]
POISON += [{}, {"a": 1}, {"xla_dump_to": "/tmp"}, [0] * 2000]


def poisoned(fields, rng):
    """Fields of which one has another value, is missing, is there twice, or is new."""
    fields = copy.deepcopy(fields)
    holder, key = rng.choice(list(places(fields)))
    what = rng.random()
    if what < 0.75:
        holder[key] = copy.deepcopy(rng.choice(POISON))
    elif what < 0.85:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[f"{key}_"] = holder[key]
    return fields


def with_checksum(fields):
    """What a stored plan's file has: the fields, after the checksum of whatever they say."""
    return {"sha256": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest(), **fields}


def places(x):
    """Every holder of a value in nested dicts and lists, with the key; each level counts as much as the next, however
    long its lists.
    """
    keys = list(x) if isinstance(x, dict) else range(len(x))[:6]
    for key in keys:
        yield x, key
        if isinstance(x[key], (dict, list)):
            yield from places(x[key])


def changed(content, rng):
    """Bytes of which some are others, missing, or new."""
    content, what = bytearray(content), rng.random()
    at = rng.randrange(len(content))
    if what < 0.5:
        content[at] ^= 1 << rng.randrange(8)
    elif what < 0.7:
        del content[at:]
    elif what < 0.8:
        content[at:at] = rng.randbytes(rng.randrange(1, 100))
    elif what < 0.9:
        content += content[: rng.randrange(1, 100)]
    else:
        content[at : at + 16] = bytes(16)
    return bytes(content)


def put_bytes(content):
    def put(path):
        path.write_bytes(content)

    return put


def put_link(path):
    path.symlink_to("/dev/zero")


def put_loop(path):
    path.symlink_to(path)


def put_folder(path):
    path.mkdir()
    (path / "mine").write_text("only copy")


def put_sparse(path):
    with open(path, "wb") as file:
        file.truncate(2**40)


def put_nothing(path):
    pass


def strange_texts(fields):
    """JSON that is hard to read, whatever it means."""
    digits = {**fields, "temp_bytes": 0}
    yield "deep lists", b"[" * 100_000
    yield "deep objects", b'{"a":' * 100_000
    yield "digits", json.dumps(digits).replace('"temp_bytes": 0', f'"temp_bytes": {"9" * 5000}').encode()
    yield "exponent", json.dumps(digits).replace('"temp_bytes": 0', '"temp_bytes": 1e999').encode()
    yield "no object", b"[1, 2]"
    yield "text", b'"text"'
    yield "encoding", b'{"version": "\xff\xfe"}'
    yield "empty", b""


def every_damage(fields, num, *, compress, seed=0):
    """``num`` pairs of a name and a function that puts a damaged file to a path.

    Args:
        fields: of a good file, without the checksum.
        compress: whether the files are compressed.
    """
    rng = random.Random(seed)
    pack = (lambda text: gzip.compress(text, 1)) if compress else (lambda text: text)
    dump = lambda fields: json.dumps(with_checksum(fields)).encode()
    good = pack(dump(fields))
    yield "fifo", os.mkfifo
    yield from (
        ("link", put_link),
        ("loop", put_loop),
        ("folder", put_folder),
        ("sparse", put_sparse),
        ("none", put_nothing),
    )
    for name, text in strange_texts(fields):
        yield name, put_bytes(pack(text))
    for name in fields:
        yield f"without {name}", put_bytes(pack(dump({k: x for k, x in fields.items() if k != name})))
    if compress:
        yield "bomb", put_bytes(gzip.compress(bytes(2**28), 9))
        yield "two streams", put_bytes(good + good)
        yield "of spaces", put_bytes(gzip.compress(b" " * 2**27 + dump(fields), 9))
    for n in range(num - (17 if compress else 14)):
        if n % 4 == 0:
            yield "bytes", put_bytes(changed(good, rng))
        elif n % 4 == 1:  # the checksum is that of the good fields
            yield "fields", put_bytes(pack(json.dumps({**with_checksum(fields), **poisoned(fields, rng)}).encode()))
        else:  # by somebody who knows how it is computed
            yield "poison", put_bytes(pack(dump(poisoned(fields, rng))))


def clear(path):
    """Remove whatever `every_damage` has put there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
