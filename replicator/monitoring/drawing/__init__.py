"""Pictures of programs and dataflows: SVG with our own layout, and Mermaid text."""
