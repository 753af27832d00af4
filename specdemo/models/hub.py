"""Between a name and a folder of files: everything that can go wrong there, each as one sentence that says what to do.

Nothing half fetched is used. The hub's client writes a file under another name until it is whole; of a model in
several files, the index tells which ones belong to it, and a folder that lacks one is refused.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from tqdm import tqdm

from ..errors import ModelUnavailable

INDEX = "model.safetensors.index.json"

Progress = Callable[[str, float], None]

_REPOSITORY_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "LICENSE*"]
_NETWORK_LIBRARIES = ("httpx", "httpx2", "requests")
"""The hub's client lets some of their errors through, another one's in each version."""


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The folder of a model on the hub, its files fetched where they are not here yet. `progress` is told how many
    bytes of them there are; what it raises ends the fetching. Raises ModelUnavailable."""
    told = 0

    def tell(done: int) -> None:
        nonlocal told
        if progress and wanted and (done >= wanted or done - told > wanted / 500):
            told = done
            progress(f"Fetching {name} ({_size(done)} of {_size(wanted)})", min(1.0, done / wanted))

    with hub_errors(name):
        try:
            missing = _missing(name)
        except DryRunError as error:
            return _stored(name, error.__cause__)
        if not missing:
            return _stored(name)
        wanted = sum(missing)
        return Path(snapshot_download(name, allow_patterns=_REPOSITORY_FILES, tqdm_class=_counter(tell)))


def _missing(name: str) -> list[int]:
    """Bytes of each file of a model that is on the hub and not here, 0 where the hub does not tell. Asked beforehand,
    because while it fetches the client learns of its files one by one. Raises DryRunError where the hub cannot be
    asked."""
    files = snapshot_download(name, allow_patterns=_REPOSITORY_FILES, tqdm_class=_counter(), dry_run=True)
    return [file.file_size or 0 for file in files if file.will_download]


def _stored(name: str, refusal: BaseException | None = None) -> Path:
    """The folder of a model that was fetched before; where it is not whole, what the hub said is raised."""
    try:
        return Path(snapshot_download(name, allow_patterns=_REPOSITORY_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        if isinstance(refusal, HfHubHTTPError):
            raise refusal from None
        raise


def _counter(tell: Callable[[int], None] = lambda done: None) -> type[Any]:
    """A progress bar for the hub's client that shows nothing and tells of the bytes. Files are fetched by several
    threads: once `tell` has raised in one, it does so in all of them, or the others would go on."""
    stopped: list[BaseException] = []

    class Counter(tqdm):  # type: ignore[misc]  # it has no types
        def __init__(self, *items: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*items, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            with self.get_lock():
                self.n += n or 0
                if stopped:
                    raise stopped[0]
                if self._counts_bytes:
                    try:
                        tell(int(self.n))
                    except BaseException as error:
                        stopped.append(error)
                        raise

    return Counter


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn what the hub's client raises into ModelUnavailable."""
    try:
        yield
    except GatedRepoError:
        raise ModelUnavailable(
            f"{name} is gated: accept its licence on its hub page, then log in with `hf auth login` or set HF_TOKEN."
        ) from None
    except RepositoryNotFoundError:
        raise ModelUnavailable(f"The hub has no model {name}, or it is private: check the name, or log in.") from None
    except HFValidationError:
        raise ModelUnavailable(f"{name!r} is neither a folder nor a hub id of the form owner/model.") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError, TimeoutError):
        raise ModelUnavailable(
            f"{name} is not in the cache and the hub cannot be reached: check the network and try again, or give a "
            "local folder."
        ) from None
    except OSError as error:
        advice = "free some space" if error.errno == errno.ENOSPC else "check the cache folder"
        raise ModelUnavailable(f"{name} could not be stored ({error.strerror or error}): {advice}.") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _NETWORK_LIBRARIES:
            raise
        raise ModelUnavailable(
            f"The connection to the hub failed while {name} was fetched ({type(error).__name__}): check the network "
            "and try again; what was fetched is kept."
        ) from None


def checked_folder(folder: Path, name: str) -> Path:
    """`folder`, if a model's configuration and all of its weight files are in it. Raises ModelUnavailable."""
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"{name} has no config.json, so it is not a model folder: check the path.")
    there = {path.name for path in folder.glob("*.safetensors")}
    if missing := _indexed(folder) - there:
        raise ModelUnavailable(
            f"{name} is incomplete, {len(missing)} of its weight files are missing ({min(missing)}): fetch it again."
        )
    if there:
        return folder
    if any(folder.glob("*.gguf")):
        raise ModelUnavailable(f"{name} holds a GGUF file, which is not read here: choose its safetensors version.")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelUnavailable(
            f"{name} has its weights as pickle files, which could run code, and they are never opened: convert them to "
            "safetensors first."
        )
    raise ModelUnavailable(f"{name} has no safetensors weights, the only kind that is read here: convert it first.")


def needs_code(folder: Path) -> bool:
    """Whether the model's configuration names code in its own repository."""
    try:
        return "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _indexed(folder: Path) -> set[str]:
    """The weight files that the folder's index names; none where there is no index."""
    try:
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelUnavailable(f"{folder / INDEX} is damaged: fetch the model again.") from None
