"""as2ray trains, distils and serves fast answer-sentence rankers on Ray."""

from as2ray.records import Ranked

__all__ = ["Ranked", "__version__"]
__version__ = "0.1.0"
