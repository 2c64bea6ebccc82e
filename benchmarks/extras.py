"""Megabytes that each extra of as2ray adds to an installation: `python -m benchmarks.extras`.

Counts the files of the packages that are installed here; an extra that is not installed is missing.
"""

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement


def iter_closure(requirements: list[str], extra: str, seen: set[str]) -> Iterator[Distribution]:
    """Yields the installed packages that requirements need, each once.

    Raises:
        PackageNotFoundError: One is not installed.
    """
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for name in (*requirement.extras, ""):
            key = f"{requirement.name.lower().replace('_', '-')}[{name}]"
            if key in seen:
                continue
            seen.add(key)
            package = distribution(requirement.name)
            if not name:
                yield package
            yield from iter_closure(package.requires or [], name, seen)


def megabytes(package: Distribution) -> float:
    """Returns the size of the files of a package."""
    files = (package.locate_file(path) for path in package.files or [])
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def main() -> None:
    """Prints a line for the package alone, and one for each extra."""
    package = distribution("as2ray")
    seen: set[str] = set()
    packages = list(iter_closure(package.requires or [], "", seen))
    sizes = {each.metadata["Name"]: megabytes(each) for each in packages}
    print(f"{'as2ray':14} {len(sizes):3} packages {sum(sizes.values()):7,.0f} MB")
    for name in sorted(sizes, key=lambda name: -sizes[name])[:6]:
        print(f"  {name:26} {sizes[name]:7,.0f} MB")
    for extra in package.metadata.get_all("Provides-Extra") or []:
        try:
            added = list(iter_closure(package.requires or [], extra, set(seen)))
        except PackageNotFoundError as error:
            print(f"{extra:14} {error}")
            continue
        print(f"{extra:14} {len(added):3} packages {sum(map(megabytes, added)):7,.0f} MB more")


if __name__ == "__main__":
    main()
