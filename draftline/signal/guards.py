"""Why torch.compile compiles again, gives up or breaks a graph, in plain words.

Dynamo names the guards that no compiled version of a function met, newest version first. A guard
holds the value a version was compiled for, so the list tells how the value went, and only for tensors
what it is now.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

INSIDE_TORCH = "(inside torch)"  # stands behind a place in torch's own code
RESUMED = " after line "  # stands in the name of what runs behind a graph break
_SHOWN = 4  # earlier values named
_AT_LIMIT = "recompile limit"
_DTYPES = {
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Double": "float64",
    "Long": "int64",
    "Int": "int32",
    "Bool": "bool",
}
_TENSOR = re.compile(r"tensor '(?P<name>.+?)' (?:Tensor )?(?P<rest>.+)", re.DOTALL)
_EXTENT = re.compile(r"(size|stride) mismatch at index (\d+)\. expected (\S+), actual (\S+)")
_RANK = re.compile(r"rank mismatch\. expected (\S+), actual (\S+)")
_DTYPE = re.compile(r"dtype mismatch\. expected (\S+), actual (\S+)")
_GRADIENT = re.compile(r"requires_grad mismatch\. expected requires_grad=([01])")
_DEVICE = re.compile(r"device index mismatch\. Expected device index to be (\S+), actual (\S+)")
_GLOBAL = re.compile(r"GLOBAL_STATE changed: (.+)")
_TYPE = re.compile(r"___check_type_id\((.+), \d+\)(?:, type=<class '([^']+)'>)?")
_OBJECT = re.compile(r"___check_obj_id\((.+), \d+\)")
_LENGTH = re.compile(r"(?:not )?len\((.+)\) [!=]= (\d+)")
_RANGE = re.compile(r"(?:(\d+) <= )?(\S+)\.size\(\)\[(\d+)\](?: <= (\d+))?")
_SIZE = re.compile(r"(\S+)\.size\(\)\[(\d+)\] == (\d+)")
_VALUE = re.compile(r"([\w.\[\]'\"]+) == (.+)")
_KEY = re.compile(r"(not )?___dict_contains\((.+), (.+)\)")
_EMPTY = re.compile(r"not ([\w.\[\]'\"]+)")
_FULL = re.compile(r"([\w.\[\]'\"]+)")
_IS_NONE = re.compile(r"([\w.\[\]'\"]+) is (not )?None")
_USED = re.compile(r"# (\S+:\d+) in ")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
_LOCAL = re.compile(r"\bL\['(\w+)'\]")
_OF_MODULE = re.compile(r"\bG\['(\w+)'\]")


@dataclass(frozen=True, slots=True)
class Failure:
    """One guard that failed. `subject` says what changed; where `was` is None it is the whole
    sentence. `now` is None where Dynamo does not tell; `used` is the line that made the guard."""

    subject: str
    was: str | None = None
    now: str | None = None
    used: str | None = None


def name_function(name: str) -> str:
    """A function's name; the rest of one after a graph break is called that."""
    found = _RESUMED.fullmatch(name)
    return name if found is None else f"{found[1]}{RESUMED}{found[2]}"


def inside_torch(path: str) -> str:
    """ " (inside torch)" for a file of torch's own, else ""."""
    return f" {INSIDE_TORCH}" if "-packages/torch/" in path.replace("\\", "/") else ""


def is_limit(failure: str) -> bool:
    """Whether a compile that failed so was given up at the recompile limit."""
    return _AT_LIMIT in failure


def describe_break(reason: str) -> str:
    """What Dynamo could not trace and its explanation, without hints and links."""
    told = reason.split("\n  Hint:")[0].split("\n\n")[0]
    return ": ".join(part.strip() for part in told.split("\n  Explanation:"))


def read_guard(reason: str) -> Failure:
    """The failure that one of Dynamo's reasons names, "0/1: " in front or not and a stack trace below
    or not."""
    first = reason.strip().partition("\n")[0]
    text = re.sub(r"^!?\d+/\d+(?:_\d+)?: ", "", first).strip()
    guard, _, remark = text.partition("  #")
    places = _USED.findall(f"#{remark}")
    # What Dynamo's own code depends on says nothing to the program's author.
    used = places[-1] if places and "_dynamo/" not in places[-1] else None
    return _read(_plain(guard.strip()), used and re.split(r"[\\/]", used)[-1])


def _plain(source: str) -> str:
    """Without the wrappers that Dynamo puts round the names of locals and globals."""
    return _OF_MODULE.sub(r"\1", _LOCAL.sub(r"\1", source))


def _read(guard: str, used: str | None) -> Failure:
    if (tensor := _TENSOR.match(guard)) is not None:
        return _read_tensor(tensor["name"], tensor["rest"])
    if (found := _GLOBAL.match(guard)) is not None:
        return Failure(f"a global setting changed: {found[1].strip().replace('_', ' ')}", used=used)
    if (found := _TYPE.match(guard)) is not None:
        return Failure(f"type of `{found[1]}`", found[2] or "the one compiled for", used=used)
    if (found := _OBJECT.match(guard)) is not None:
        if found[1].endswith(".__code__"):
            made = found[1].removesuffix(".__code__")
            return Failure(f"`{made}` is a new function each time", used=used)
        return Failure(f"`{found[1]}` is another object than the one compiled for", used=used)
    if (found := _LENGTH.match(guard)) is not None:
        return Failure(f"length of `{found[1]}`", found[2], used=used)
    if (found := _SIZE.fullmatch(guard)) is not None:
        return Failure(f"size of `{found[1]}` in dimension {found[2]}", found[3], used=used)
    if (found := _RANGE.fullmatch(guard)) is not None and (found[1] or found[4]):
        bounds = " to ".join(filter(None, (found[1], found[4])))
        open_end = " or more" if found[4] is None else ""
        return Failure(
            f"size of `{found[2]}` in dimension {found[3]} left what was compiled, "
            f"{bounds}{open_end}",
            used=used,
        )
    if (found := _KEY.fullmatch(guard)) is not None:
        has = "now has" if found[1] else "no longer has"
        return Failure(f"`{found[3]}` {has} the key {found[2]}", used=used)
    if (found := _IS_NONE.fullmatch(guard)) is not None:
        return Failure(f"`{found[1]}` {'became' if found[2] else 'is no longer'} None", used=used)
    if (found := _EMPTY.fullmatch(guard)) is not None:
        return Failure(f"`{found[1]}` is no longer empty or zero", used=used)
    if (found := _FULL.fullmatch(guard)) is not None:
        return Failure(f"`{found[1]}` became empty or zero", used=used)
    if (found := _VALUE.fullmatch(guard)) is not None and ".size()" not in guard:
        return Failure(f"value of `{found[1]}`", found[2], used=used)
    return Failure(f"a guard no longer holds: {guard}", used=used)


def _read_tensor(name: str, rest: str) -> Failure:
    if (found := _EXTENT.match(rest)) is not None:
        return Failure(f"{found[1]} of `{name}` in dimension {found[2]}", found[3], found[4])
    if (found := _RANK.match(rest)) is not None:
        return Failure(f"number of dimensions of `{name}`", found[1], found[2])
    if (found := _DTYPE.match(rest)) is not None:
        was, now = (_DTYPES.get(kind, kind) for kind in found.groups())
        return Failure(f"dtype of `{name}`", was, now)
    if (found := _GRADIENT.match(rest)) is not None:
        was, now = ("False", "True") if found[1] == "0" else ("True", "False")
        return Failure(f"requires_grad of `{name}`", was, now)
    if (found := _DEVICE.match(rest)) is not None:
        return Failure(f"device of `{name}`", found[1], found[2])
    return Failure(f"tensor `{name}` changed: {rest.strip()}")


def describe(reasons: Sequence[str]) -> str:
    """What changed, in words, from the reasons of one recompile as Dynamo lists them; with the line
    that depends on it where it is known."""
    failures = [read_guard(reason) for reason in reasons]
    if not failures:
        return "no reason is given"
    newest = failures[0]
    used = f", which {newest.used} uses" if newest.used else ""
    if newest.was is None:
        return f"{newest.subject}{used}"
    earlier = [
        f.was
        for f in failures[1:]
        if f.subject == newest.subject and f.was not in (None, newest.was)
    ]
    if not earlier:
        return f"{newest.subject} changed from {newest.was} to {newest.now or 'another'}{used}"
    values = [*reversed(earlier), newest.was]
    told = [*values, newest.now] if newest.now else values
    shown = [str(value) for value in values[-_SHOWN:]]
    cut = "..., " if len(values) > _SHOWN else ""
    return (
        f"{newest.subject} keeps {_course(told)}: {cut}{', '.join(shown)}, "
        f"now {newest.now or 'another'}{used}"
    )


def _course(values: Sequence[str | None]) -> str:
    try:
        numbers = [float(value or "") for value in values]
    except ValueError:
        return "changing"
    rises = [b > a for a, b in itertools.pairwise(numbers)]
    return "growing" if all(rises) else "changing" if any(rises) else "falling"
