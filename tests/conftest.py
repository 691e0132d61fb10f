"""What pytest must not collect: programs that tests start on ranks, and modules that only ranks import."""

from __future__ import annotations

collect_ignore_glob = ["distributed/checks/*", "distributed/programs/*"]
