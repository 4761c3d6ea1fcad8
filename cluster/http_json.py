"""JSON as the HTTP door writes it."""

import json

# In ASCII: some clients take other characters of a text, U+2028 say, for the end of a line.
encode = json.JSONEncoder(separators=(",", ":")).encode
"""Text without spaces or line ends, of what JSON can hold."""
