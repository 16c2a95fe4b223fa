"""What the program that started a process told it: by variables, or if asked."""
