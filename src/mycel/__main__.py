"""``python -m mycel``, and so ``torchrun ... -m mycel probe``."""

from __future__ import annotations

from mycel.cli import main

if __name__ == "__main__":
    main()
