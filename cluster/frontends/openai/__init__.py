"""OpenAI's API over HTTP: bodies, the gateway's requests they make, and answers."""
