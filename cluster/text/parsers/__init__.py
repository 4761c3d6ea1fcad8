"""Parsers of a model's text: they find reasoning, content and tool calls, in the form of its chat template."""
