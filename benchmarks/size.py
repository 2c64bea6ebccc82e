"""Counts executable lines: no imports, docstrings, comments or blank lines.

python -m benchmarks.size
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_lines(source: str) -> int:
    """Executable lines of a module's source."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or is_string:
            assert node.end_lineno is not None
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def count_packages(root: Path = ROOT) -> Counter[str]:
    """Executable lines of each package of `as2ray`, of `pipelines` and of `tune_spaces`."""
    counts: Counter[str] = Counter()
    for top in ("as2ray", "pipelines", "tune_spaces"):
        for path in (root / top).rglob("*.py"):
            parts = path.relative_to(root).parts
            package = "/".join(parts[:2]) if top == "as2ray" else top
            counts[package] += count_lines(path.read_text(encoding="utf-8"))
    return counts


def main() -> None:
    """Prints the counts and their sum."""
    counts = count_packages()
    for package, lines in sorted(counts.items()):
        print(f"{lines:7,}  {package}")
    print(f"{counts.total():7,}  in all")


if __name__ == "__main__":
    main()
