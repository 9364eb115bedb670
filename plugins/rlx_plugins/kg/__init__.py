"""Multi-turn question answering over a knowledge graph (after KG-R1, arXiv 2509.26383)."""
