"""What a model's text says: reasoning, content and tool calls, as its chat template has them."""
