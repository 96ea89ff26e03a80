"""What is said about a model besides its numbers: names, authorship, licence, sampling defaults."""
