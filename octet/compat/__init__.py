"""Other libraries' own names over Octet's library, so that files written for them run without a change."""
