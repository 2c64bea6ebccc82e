"""A stream in front of another, which decides about each line once it is complete."""

import threading
from typing import Any, TextIO


class LineStream:
    """Passes lines on to a stream; subclasses overwrite `take`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Takes text; each line goes where it belongs once it is complete."""
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self.take(line)
        return len(text)

    def take(self, line: str) -> None:
        """Passes a line on; it has no end of line."""
        self._stream.write(line + "\n")

    def close_line(self) -> None:
        """Writes what has no end of line yet."""
        if self._line:
            self._stream.write(self._line)
            self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
