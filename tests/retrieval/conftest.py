"""Small folders of documents."""

from pathlib import Path

import pytest

MARKDOWN = """---
draft: true
---
# Whales

The blue whale is the largest animal. It weighs up to **199 tonnes**.
It eats *krill*.

## Songs

- Humpback whales sing for hours.
- Nobody knows why.

```
whale = 1
```

| kind | length |
|------|--------|
| blue | 30 metres |
"""

HTML = """<!doctype html><html><head><title>Ants &amp; bees</title><style>p {}</style></head>
<body><nav>Home</nav><script>ant()</script><h2>Work</h2>
<p>An ant carries <b>fifty</b> times its weight.</p><p>Bees dance.<br>They sleep at night.</p>
<pre>code()</pre></body></html>"""


@pytest.fixture
def documents(tmp_path) -> Path:
    """Four documents of four kinds, and four files that are none."""
    root = tmp_path / "documents"
    (root / "insects").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git" / "config.txt").write_text("Hidden text is no document.")
    (root / "whales.md").write_text(MARKDOWN)
    (root / "insects" / "ants.html").write_text(HTML)
    (root / "notes.txt").write_text("Penguins cannot fly.\nThey swim.\n\nOwls hunt at night.\n")
    (root / "rows.jsonl").write_text(
        '{"id": "a", "title": "Cats", "text": "Cats sleep all day. Cats purr."}\n'
        '{"text": "Dogs bark at night."}\n{"text": ""}\n'
    )
    (root / "empty.md").write_text("```\ncode\n```\n")
    (root / "picture.png").write_bytes(b"\x89PNG\0\0")
    (root / "broken.txt").write_bytes(b"caf\xe9 \xff\xfe")
    (root / "zeros.txt").write_bytes(b"text\0text")
    return root
