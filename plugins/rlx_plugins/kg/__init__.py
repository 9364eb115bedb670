"""Questions about a knowledge graph, answered over several turns (design 000, after KG-R1)."""
