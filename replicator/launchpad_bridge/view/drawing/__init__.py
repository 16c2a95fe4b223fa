"""Pictures of a program: SVG with a layout of our own, and Mermaid text."""
