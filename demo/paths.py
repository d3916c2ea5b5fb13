"""Where the two embedded checkpoints live. Imports nothing heavy, so any command may ask for a path."""

from pathlib import Path

TARGET_DIR = Path(__file__).resolve().parent / "target"
DRAFT_DIR = Path(__file__).resolve().parent / "draft"
