"""`tandem batch`: a file of requests in OpenAI's batch format, answered into another file."""
