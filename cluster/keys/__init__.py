"""Keys of callers: a file of them, what each may do, and how much in a minute."""
