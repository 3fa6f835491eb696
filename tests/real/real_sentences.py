"""A hundred plain English sentences to translate, written for these tests."""

SENTENCES = [
    line.strip()
    for line in """
    How are you today?
    The children were playing happily in the garden.
    I have never seen such a strange animal in my life.
    Please close the window before you leave the room.
    She bought three apples and a loaf of bread at the market.
    The train to the north leaves at half past seven.
    My brother works in a small hospital near the river.
    We spent the whole afternoon looking for the lost keys.
    If it rains tomorrow, we will stay at home.
    The old man told us a story about his first job.
    Nobody knows who painted this picture.
    Our teacher asked us to write a letter to a friend.
    The price of coffee has doubled since last year.
    You should drink more water when it is hot.
    He forgot his umbrella on the bus again.
    The museum is closed on Mondays.
    They have been married for twenty years.
    I would like a table for two, please.
    The dog barked all night and nobody could sleep.
    Scientists found a new kind of frog in the forest.
    Could you tell me where the station is?
    The meeting was moved to Friday morning.
    This computer is much faster than the old one.
    My grandmother makes the best soup in the world.
    The road was blocked by a fallen tree.
    He speaks four languages and is learning a fifth.
    The company will open two new offices next month.
    I do not understand why she is so angry.
    The water in the lake is cold but very clear.
    All passengers must show their tickets.
    The doctor told him to rest for a week.
    A good book is a good friend.
    The lights went out in the middle of the film.
    She has lived in this city since she was a child.
    The bridge was built more than a hundred years ago.
    We are running out of time.
    He closed his eyes and listened to the music.
    The shop sells shoes, hats and winter coats.
    Most of the students passed the exam.
    The government plans to plant a million trees.
    I left my phone in the kitchen.
    The bird built its nest under the roof.
    What would you do with a million dollars?
    The soldiers marched through the empty streets.
    There is a small hole in my left shoe.
    The new law protects people who rent their homes.
    It was so dark that we could not see the path.
    He promised to call her as soon as he arrived.
    The farmer sold his last horse in the spring.
    Let me know if you need anything else.
    The moon was hidden behind thick clouds.
    Her answer surprised everyone in the room.
    The ship sank in less than two hours.
    You can pay by card or in cash.
    The baker gets up at four every morning.
    I have read your letter with great interest.
    The team lost the match in the last minute.
    Be careful, the plate is hot.
    They walked along the beach until sunset.
    The factory produces ten thousand bottles a day.
    My sister wants to become a pilot.
    The results of the study were published yesterday.
    We need to buy milk, eggs and flour.
    The king had three daughters and no sons.
    The box is too heavy for me to lift.
    He wrote the song in a single night.
    The river flows from the mountains to the sea.
    Do not forget to feed the cat.
    The judge asked the witness to speak louder.
    Our neighbours are moving to another country.
    The soup needs a little more salt.
    She answered every question without a mistake.
    The library has more than two million books.
    I missed the bus and had to walk.
    The wind blew the papers off the table.
    This medicine should be taken after meals.
    The village is famous for its cheese.
    He has not spoken to his father for years.
    The mechanic repaired the engine in an hour.
    The first snow fell in the middle of November.
    We were surprised by the size of the house.
    The police are looking for a man with a red beard.
    She put the flowers in a blue vase.
    The lesson begins at nine and ends at noon.
    It is easier to learn a language when you are young.
    The plane landed safely in spite of the storm.
    He carries a picture of his son in his wallet.
    The garden is full of roses and bees.
    I will never make that mistake again.
    The bank refused to lend them the money.
    The city has changed a lot in the last ten years.
    Everyone laughed except the man in the front row.
    The carpenter made a chair for each of his children.
    Turn left at the church and go straight on.
    The boy who broke the window apologised.
    Our guests will arrive in about an hour.
    The experiment failed because the water was too warm.
    She has a good memory for names and faces.
    The hotel is only five minutes from the beach.
    Thank you very much for your help.
    """.strip().splitlines()
]
