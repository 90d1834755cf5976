"""Share among all routes: problem documents, guards, pages and streams."""
