"""The fork server's own process. ``python -I <this folder>`` starts it; it imports the standard library only."""
