"""The routes of prompts that nobody decodes: embeddings, scores and rankings."""
