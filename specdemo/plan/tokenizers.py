"""Whether the two models of a plan can work together, as far as the files that are here tell it. Nothing is fetched."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from ..models.cache_folder import cache_folder
from ..models.names import EMBEDDED, EMBEDDED_NAME
from ..models.vocabulary import check_same_vocabulary, read_vocabulary

UNSEEN = "The tokenizers of the two models are not both at hand: they are compared when the pair is loaded."


def tokenizers_note(target: str, draft: str) -> str | None:
    """None where the tokenizers of two models agree, else that they are not at hand. Raises ModelUnavailable where they
    differ."""
    folders = _folder(target), _folder(draft)
    vocabularies = [folder and read_vocabulary(folder) for folder in folders]
    if not (vocabularies[0] and vocabularies[1]):
        return UNSEEN
    check_same_vocabulary(target, vocabularies[0], draft, vocabularies[1])
    return None


def _folder(name: str) -> Path | None:
    """Where the model's tokenizer lies on this machine."""
    if name == EMBEDDED:
        folder = cache_folder() / EMBEDDED_NAME
        return folder if folder.is_dir() else None
    local = Path(name).expanduser()
    if local.is_dir():
        return local if (local / "tokenizer.json").is_file() else None
    if name.count("/") != 1 or name[0] in "./~":
        return None
    found = try_to_load_from_cache(name, "tokenizer.json")
    return Path(found).parent if isinstance(found, str) else None
