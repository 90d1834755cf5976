"""Access: who a request comes from, what its key allows, and the record of what it did."""
