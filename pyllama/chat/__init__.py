"""What a chat adds to text: thoughts, tools and their calls, found in an answer or shown to a template. Pure."""
