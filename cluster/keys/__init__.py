"""Keys of callers: the file that lists them, what each may do, and how much in a minute."""
