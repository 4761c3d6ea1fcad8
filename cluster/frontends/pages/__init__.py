"""Pages for people, each one file to the browser: what the cluster does (/), and what the API takes (/docs)."""
