"""Pages in a real browser: what drives it, and what is looked for in a page."""
