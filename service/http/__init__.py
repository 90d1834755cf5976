"""What every route shares: problem documents, guards, pages and streams."""
