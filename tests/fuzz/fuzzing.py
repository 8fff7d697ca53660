"""Damaged and absurd files for every reader: each is read, or refused by one sentence without control characters.

Every input follows from a seed. A batch of them runs in a forked process, so that one that crashes, hangs or takes all
memory is a finding too. `python -m tests.fuzz --minutes 60` goes on for an hour; `test_fuzz.py` takes seconds.
"""

import contextlib
import gzip
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from clipline.errors import CliplineError

CASES = Path(__file__).parent / "cases"
SECONDS, MEMORY = 20, 3 << 30  # of one input
TOKENS = [
    b"", b"\x00", b"\x1b[31m", b"\x9b", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r\n", b"\t", b'"', b"'", b",", b";",
    b"[", b"]", b"{", b"}", b"[" * 100, b"null", b"true", b"NaN", b"nan", b"-nan", b"Infinity", b"-inf", b"1e400",
    b"1e-400", b"-1", b"0", b"00", b"1.5", b"-0.0", b"9" * 400, b"9" * 5000, b"18446744073709551616", b"2147483648",
    b"-9223372036854775809", b"\xe2\x80\xae", b"\xed\xa0\x80", b"../../x", b"/etc/passwd", b"x" * 5000,
    b"1979-05-27", b"<script>", b"%s%n", b"\\u0000", b"1_000", b"0x1f", b"{}", b"[]", b'""', b'{"a":1}',
]  # fmt: skip
ODD = [
    None, True, -1, 0, 1.5, 1e308, 10**400, "", "x", "\x1b[31m", "\x00", "9" * 5000, [], {}, [["x"]], float("nan"),
    "a" * 3000,
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Good files, and what reads the folder that they are in. One of `fuzzed` is changed each time."""

    name: str
    files: dict[str, bytes] = field(repr=False)
    read: Callable[[Path], object]
    fuzzed: tuple[str, ...] = ()  # all of them
    slow: int = 1  # so many times fewer inputs of it


@dataclass(frozen=True)
class Finding:
    """What should not have happened, and the input."""

    target: str
    what: str
    file: str
    data: bytes = field(repr=False)

    def keep(self) -> Path:
        """Write it down as a case."""
        path = CASES / self.target / f"{sha256(self.data).hexdigest()[:12]}.{self.file}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.data)
        return path


def plain(rng: random.Random, data: bytes) -> bytes:
    """A few changes of bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, length = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 4, 8, 64, 1000))
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[at : at + length]
        elif kind == 4:
            out[at:at] = rng.choice(TOKENS)
        elif kind == 5:
            del out[at:]
        else:
            words = [match.span() for match in re.finditer(rb"[\w.+-]+", bytes(out[:20_000]))] or [(at, at)]
            start, end = rng.choice(words)
            out[start:end] = rng.choice(TOKENS)
    return bytes(out)


def changed_json(rng: random.Random, data: bytes) -> bytes:
    """One entry of JSON, or of one of its lines, is gone, doubled or odd."""
    lines = data.split(b"\n")
    place = rng.randrange(max(1, len(lines) - 1))
    whole = len(lines) > 1 and data.lstrip()[:1] == b"{" and lines[0].rstrip()[-1:] != b"}"
    text = data if whole else lines[place]
    try:
        value = json.loads(text)
        spots: list = []

        def walk(part: object) -> None:
            for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
                spots.append((part, key))
                if isinstance(inner, dict | list) and inner:
                    walk(inner)

        walk(value)
        owner, key = rng.choice(spots)
        if rng.random() < 0.2:
            del owner[key]
        else:
            owner[key] = rng.choice(ODD)
        new = json.dumps(value).encode("utf-8", "surrogatepass")
    except (ValueError, AttributeError, IndexError, TypeError):
        return plain(rng, data)
    return new if whole else b"\n".join([*lines[:place], new, *lines[place + 1 :]])


def changed_zip(rng: random.Random, data: bytes) -> bytes:
    """A member of an archive is changed, and the archive made anew."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        chosen = rng.choice(old.namelist())
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, plain(rng, content[:200]) + content[200:] if name == chosen else content)
    return out.getvalue()


def changed_tensors(rng: random.Random, data: bytes) -> bytes:
    """The header of a safetensors file is changed, its length put right, and its checksum made anew."""
    (length,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + length]
    try:
        value = json.loads(header)
        inner = value.get("__metadata__", {})
        if inner and rng.random() < 0.7:
            name = rng.choice([*inner])
            text = inner[name].encode()
            inner[name] = changed_json(rng, text).decode("utf-8", "replace")
            header = json.dumps(value, separators=(",", ":")).encode()
        else:
            header = changed_json(rng, header).replace(b'"checksum": "', b'"checksum":"')
    except ValueError:
        header = plain(rng, header)
    header += b" " * (-len(header) % 8)
    return signed(struct.pack("<Q", len(header)) + header + data[8 + length :])


def signed(data: bytes) -> bytes:
    """With a checksum that fits: whoever damages a file on purpose can do that too."""
    mark = b'"checksum":"'
    if mark not in data:
        return data
    place = data.index(mark) + len(mark)
    blank = data[:place] + b"0" * 64 + data[place + 64 :]
    return data[:place] + sha256(blank).hexdigest().encode() + data[place + 64 :]


def changed(rng: random.Random, name: str, data: bytes) -> bytes:
    """The file, changed in a way that suits what its name ends in."""
    if rng.random() < 0.4:
        return plain(rng, data)
    if name.endswith(".gz"):
        return gzip.compress(changed(rng, name[:-3], gzip.decompress(data)), 1, mtime=0)
    if name.endswith(".npz"):
        return changed_zip(rng, data)
    if name.endswith(".safetensors"):
        return changed_tensors(rng, data)
    if name.endswith((".json", ".jsonl")):
        return changed_json(rng, data)
    return plain(rng, data)


def hostile(text: str) -> bool:
    """Whether a terminal would do more than show it."""
    return any(not one.isprintable() and one not in "\n\t" for one in text)


def outcome(target: Target, folder: Path) -> str:
    """ "read" or "refused"; whatever else came of it begins with "!"."""
    spoken = io.StringIO()
    try:
        with (
            warnings.catch_warnings(record=True) as heard,
            contextlib.redirect_stdout(spoken),
            contextlib.redirect_stderr(spoken),
        ):
            warnings.simplefilter("always")
            answer = target.read(folder)
        said = [str(one.message) for one in heard if issubclass(one.category, Warning)] + [spoken.getvalue()]
        said += [answer] if isinstance(answer, str) else []
        result = "read"
    except CliplineError as error:
        said, result = [str(error)], "refused"
        if not str(error).strip() or len(str(error)) > 130_000:
            return f"!a refusal of {len(str(error))} letters"
    except BaseException as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if "clipline" in one.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return f"!{type(error).__name__} at {where}: {str(error)[:200]!r}"
    for text in said:
        if hostile(text):
            bad = next(one for one in text if not one.isprintable() and one not in "\n\t")
            place = text.index(bad)
            return f"!control character {bad!r} in {text[max(0, place - 60) : place + 20]!r}"
    return result


def lay(target: Target, folder: Path, file: str, data: bytes) -> None:
    """The files of a target in an empty folder, one of them changed."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, good in target.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if name == file else good)


def inputs(target: Target, seed: int, count: int):
    """File and content of inputs number `seed` and on."""
    for number in range(seed, seed + count):
        rng = random.Random(f"{target.name} {number}")
        file = rng.choice(target.fuzzed or tuple(target.files))
        with contextlib.suppress(zipfile.BadZipFile, zlib.error, EOFError):
            yield file, changed(rng, file, target.files[file])


def _child(target: Target, seed: int, count: int, work: Path) -> None:
    spent = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (spent + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counts, found = Counter(), []
    for file, data in inputs(target, seed, count):
        (work / "current").write_bytes(pickle.dumps((file, data)))
        lay(target, work / "files", file, data)
        began = time.process_time()
        came = outcome(target, work / "files")
        if time.process_time() - began > SECONDS:
            came = f"!took {time.process_time() - began:.0f} s"
        counts[came if came in ("read", "refused") else "found"] += 1
        found += [Finding(target.name, came[1:], file, data)] if came.startswith("!") else []
    (work / "done").write_bytes(pickle.dumps((counts, found)))


def batch(target: Target, seed: int, count: int, work: Path) -> tuple[Counter, list[Finding]]:
    """Outcomes of so many inputs, and what was found; from a process of its own."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads that wait
        child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(work)
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            _child(target, seed, count, work)
            code = 0
        finally:
            os._exit(code)
    began = time.time()
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        current = work / "current"
        if time.time() - (current.stat().st_mtime if current.is_file() else began) > 6 * SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    if (work / "done").is_file():
        return pickle.loads((work / "done").read_bytes())
    file, data = pickle.loads((work / "current").read_bytes())
    return Counter(found=1), [Finding(target.name, f"the process ended: {ended[1]}", file, data)]


def cases(targets: list[Target]):
    """Target, file and content of every finding that was kept."""
    by_name = {target.name: target for target in targets}
    for path in sorted(CASES.glob("*/*")):
        yield by_name[path.parent.name], path.name.partition(".")[2], path.read_bytes()
