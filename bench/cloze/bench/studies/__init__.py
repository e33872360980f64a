"""Programs for one question each; no command and no test depends on them."""
