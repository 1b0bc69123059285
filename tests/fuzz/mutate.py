"""Make hostile files out of valid ones: by bytes, and by the values of JSON. Every case follows from its seed."""

import copy
import json
import random

HOSTILE_VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, -1e308),
    *(float("nan"), float("inf"), "", "a", "\0", "\n", "\ud800", "../secret", "/etc/passwd", "x" * 10_000),
    *([], {}, [[]], [None], {"": {}}, [1, "a", None], {"step": 1}, "NaN", "1e999", "posix.system"),
]


def mutate_json(content, rng):
    """A JSON value with one to three of its values, at any depth, replaced, removed, doubled or nested."""
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        holder = {"root": content}
        parent, key = rng.choice(list(_places(holder)))
        action = rng.randrange(5)
        if action == 0 and parent is not holder:
            del parent[key]
        elif action == 1 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(rng.choice(parent)))
        elif action == 2:
            parent[key] = [parent[key]]
        elif action == 3 and isinstance(parent, dict) and parent is not holder:
            parent[rng.choice(["", "step", "\n", "new", "x" * 1000])] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(rng.choice(HOSTILE_VALUES))
        content = holder["root"]
    return content


def _places(value):
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, item in items:
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def to_text(content, rng):
    """As JSON; now and then so deep, or with such numbers, that parsers give up."""
    text = json.dumps(content)
    kind = rng.randrange(40)
    if kind == 0:
        return "[" * 100_000
    if kind == 1:
        return '{"a":' * 5_000 + text + "}" * 5_000
    if kind == 2:
        return text.replace("1", "1" * 5_000, 1)
    return text


def mutate_bytes(data, rng):
    """Bits flipped, parts cut out, doubled or overwritten, the end lost."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not data:
            break
        action, place = rng.randrange(6), rng.randrange(len(data))
        length = rng.choice([1, 2, 4, 8, 64])
        if action == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif action == 1:
            del data[place : place + length]
        elif action == 2:
            data[place:place] = data[place : place + length]
        elif action == 3:
            data[place : place + length] = rng.randbytes(length)
        elif action == 4:
            data[place : place + length] = rng.choice([b"\0", b"\xff"]) * length
        else:
            del data[place:]
    return bytes(data)


def hostile(data, seed):
    """One hostile version of a file; JSON and JSON lines are changed as values half of the time."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        try:
            lines = [json.loads(line) for line in data.splitlines()] if data.count(b"\n") > 1 else [json.loads(data)]
        except ValueError:
            try:
                lines = [json.loads(data)]
            except ValueError:
                return mutate_bytes(data, rng)
        place = rng.randrange(len(lines))
        texts = [json.dumps(line) for line in lines]
        texts[place] = to_text(mutate_json(lines[place], rng), rng)
        return ("\n".join(texts) + "\n").encode("utf-8", "surrogatepass")
    return mutate_bytes(data, rng)
