"""How a job answers a growing table: runs over the files that no run has answered, and the ledger of them."""
