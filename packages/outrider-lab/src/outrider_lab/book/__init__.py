"""Every experiment in one go, and one page that shows what came of them."""
