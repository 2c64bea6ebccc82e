"""What the tests of the service ask."""

QUESTION = "What is kovarin?"
CANDIDATES = ["Badesso.", "Kovarin ne kovarin.", "Lala muri.", "Muri.", "Quintol ba.", "Zelimut."]
