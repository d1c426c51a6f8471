"""A folder of pictures, with captions beside them or one sub-folder for each class."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from multimodal.data.source import (
    IMAGE_EXTENSIONS,
    NO_CAPTION,
    BadSample,
    Sample,
    even_groups,
    has_picture_ending,
    parse_sidecars,
    read_file,
    report_problems,
    split_name,
)

_SIDECARS = ("txt", "json")


class FolderSource:
    """Pictures of a folder and its sub-folders, sorted by path; the key is the relative path.

    If any picture has a .txt or .json of the same name, in any case, captions come from these, and
    a picture without one is left out. Otherwise a picture in a sub-folder has the first
    sub-folder's name as its caption and its class. Otherwise pictures have no caption, which is
    enough to embed them. Hidden files and folders are not read.

    Args:
        path: The folder.

    Raises:
        ValueError: when there is no such folder, or no picture in it.
    """

    def __init__(self, path: str):
        self._root = Path(path)
        self.description = f"folder {path}"
        if not self._root.is_dir():
            raise ValueError(f"{path}: there is no such folder")
        images, sidecars, problems = _listing(self._root)
        self._sidecars = {key: sidecars[key] for key, _ in images if key in sidecars}
        if self._sidecars:
            problems[NO_CAPTION] = sum(key not in sidecars for key, _ in images)
            problems["no image"] = len(sidecars) - len(self._sidecars)
            images = [(key, name) for key, name in images if key in sidecars]
        self._names = [name for _, name in images]
        self.problems = {reason: count for reason, count in problems.items() if count}
        report_problems(self.description, self.problems)
        if not self._names:
            raise ValueError(
                f"{path}: no picture in this folder or below it; looked for {_looked_for()}"
            )

    def __len__(self) -> int:
        return len(self._names)

    def groups(self) -> list[int]:
        return even_groups(len(self))

    def read(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        name = self._names[index]
        image = read_file(self._root / name, name)
        stem = split_name(name)[0]
        if stem in self._sidecars:
            text, record = self._beside(stem, "txt"), self._beside(stem, "json")
            captions, meta = parse_sidecars(name, text=text, record=record, label=None)
            return Sample(name, image, captions, meta)
        folder, slash, _ = name.partition("/")
        if slash:
            return Sample(name, image, (folder,), {"cls": folder})
        return Sample(name, image, (), {})

    def place(self, index: int) -> str:
        return str(Path(self._names[index]).parent)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in self._names:
            try:
                size = (self._root / name).stat().st_size
            except OSError:  # such as a link that leads nowhere, which `read` complains of
                size = -1
            digest.update(f"{name}\t{size}\n".encode("utf-8", "surrogateescape"))
        for key in sorted(self._sidecars):
            for ending in _SIDECARS:
                try:
                    text = self._beside(key, ending)
                except BadSample:
                    text = None
                if text is not None:
                    digest.update(hashlib.sha256(text).digest())
        return digest.hexdigest()

    def _beside(self, stem: str, ending: str) -> bytes | None:
        name = self._sidecars[stem].get(ending)
        return None if name is None else read_file(self._root / name, stem)


def has_pictures(path: str) -> bool:
    """Whether there is a picture in a folder, without listing more of it than needed."""
    return any(
        has_picture_ending(file) and not file.startswith(".")
        for _, files in _walk(Path(path), lambda error: None)
        for file in files
    )


def picture_files(path: Path) -> list[Path]:
    """A file itself, or all pictures of a folder and its sub-folders, sorted by path.

    Raises:
        ValueError: when there is nothing of this name, or no picture in the folder.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such picture or folder")
    found = [path / name for _, name in _listing(path)[0]]
    if not found:
        raise ValueError(f"{path}: no picture in this folder; looked for {_looked_for()}")
    return found


def _looked_for() -> str:
    return f"{', '.join(IMAGE_EXTENSIONS)} in any case"


def _listing(
    root: Path,
) -> tuple[list[tuple[str, str]], dict[str, dict[str, str]], Counter[str]]:
    """Pictures and the files beside them. Links to folders are followed.

    Returns:
        Pictures as (relative path without ending, relative path); by path without ending the
        relative paths of sidecars by their ending; and what else there is, by reason.
    """
    images, sidecars, problems = [], {}, Counter()

    def unreadable(error: OSError) -> None:
        problems["unreadable folder"] += 1

    for folder, files in _walk(root, unreadable):
        inside = Path(folder).relative_to(root).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        for file in sorted(files):
            name = prefix + file
            key, extension = split_name(name)
            if file.startswith("."):
                continue
            if extension in IMAGE_EXTENSIONS:
                images.append((key, name))
            elif extension in _SIDECARS:
                # Some tools name the text of `cat.jpg` `cat.jpg.txt`.
                key = split_name(key)[0] if has_picture_ending(key) else key
                sidecars.setdefault(key, {})[extension] = name
            else:
                problems["unknown file type"] += 1
    return sorted(images, key=lambda pair: pair[1]), sidecars, problems


def _walk(root: Path, unreadable: Callable[[OSError], None]) -> Iterator[tuple[str, list[str]]]:
    """Folders to look into, each once, with the names of their files."""
    seen = {os.path.realpath(root)}
    for folder, folders, files in os.walk(root, followlinks=True, onerror=unreadable):
        folders[:] = sorted(name for name in folders if _is_new(Path(folder, name), seen))
        yield folder, files


def _is_new(folder: Path, seen: set[str]) -> bool:
    """Whether to look into a folder: not if hidden, nor a second time by a link."""
    real = os.path.realpath(folder)
    if folder.name.startswith(".") or real in seen:
        return False
    seen.add(real)
    return True
