"""Sentences made up here: telephone menus, voice mail, numbers, in the words of this project.

Of the kind that machines read to people; `whisper_texts` mixes them with others.

>>> import random
>>> made_up("en", random.Random(3))
'The party that you have asked for is no longer in use.'
"""

from __future__ import annotations

import random

_KEYS = {
    "en": """
        1; 2; 3; 4; 5; 6; 7; 8; 9; 0; star; pound; zero; one; two
    """,
    "fr": """
        1; 2; 3; 4; 5; 6; 7; 8; 9; 0; étoile; dièse
    """,
    "de": """
        1; 2; 3; 4; 5; 6; 7; 8; 9; 0
    """,
}

#: What a caller may want, as an infinitive.
_WISHES = {
    "en": """
        hear the oldest message; skip to the next recording; keep this greeting; delete
        everything; call back the sender; speak with an agent; change your security code; join
        the meeting; leave the meeting; turn up the volume of the speaker; stop the music; go
        back one step; return to the first menu; send a copy to another extension; mark it as
        urgent; repeat these choices; record your name again; find out who is in the conference;
        mute or unmute your line; lock the room; set a wake up call; listen to the weather
        forecast; transfer the caller; forward your calls to a mobile phone; check your account
        balance; hang up
    """,
    "fr": """
        écouter le plus ancien message; passer à l'enregistrement suivant; garder cette annonce;
        tout effacer; rappeler l'expéditeur; parler à un conseiller; changer votre code secret;
        rejoindre la réunion; quitter la réunion; augmenter le volume du haut-parleur; arrêter
        la musique; revenir en arrière; retourner au premier menu; envoyer une copie à un autre
        poste; marquer ce message comme urgent; répéter ces choix; enregistrer à nouveau votre
        nom; savoir qui est dans la conférence; couper ou rétablir votre micro; transférer
        l'appel; connaître le solde de votre compte; raccrocher
    """,
    "de": """
        die älteste Nachricht zu hören; die Ansage zu behalten; alles zu löschen; mit einem
        Mitarbeiter zu sprechen; Ihre Geheimzahl zu ändern; an der Konferenz teilzunehmen; die
        Auswahl noch einmal zu hören; Ihren Namen neu aufzunehmen; das Gespräch weiterzuleiten;
        aufzulegen
    """,
}

_THINGS = {
    "en": """
        message; messages; voice mail; mailbox; mailbox number; password; account number;
        extension; telephone number; conference; conference number; recording; greeting; call;
        directory; agent; queue; line; caller; operator; administrator; server; system; channel;
        number; code; area code; file; folder; menu; name; first name; last name; invoice;
        order; room; user; party; connection; department
    """,
    "fr": """
        message; mot de passe; numéro de compte; poste; numéro de téléphone; conférence;
        enregistrement; annonce; appel; annuaire; conseiller; ligne; correspondant; opérateur;
        serveur; système; boîte vocale; nom; prénom; dossier; menu; utilisateur; service;
        connexion; numéro; code
    """,
    "de": """
        Nachricht; Kennwort; Kontonummer; Durchwahl; Telefonnummer; Konferenz; Aufnahme; Ansage;
        Anruf; Leitung; Mailbox; Verbindung
    """,
}

_LINES = {
    "en": [
        "To {wish}, press {key}.",
        "If you would rather {wish}, dial {key} now.",
        "Press {key} if you want to {wish}, or {key} to {wish}.",
        "Press {key}.",
        "You can {wish} by pressing {key} at any time.",
        "Enter the {thing} and then press {key}.",
        "Please say or type your {thing}, followed by the {key} key.",
        "Please dial the {thing} of the person that you are trying to reach.",
        "That {thing} is not valid. Please try again.",
        "I am sorry, I did not find any {thing} by that name.",
        "Sorry, the {thing} could not be saved.",
        "Sorry, this {thing} is busy at the moment.",
        "The {thing} has been changed.",
        "Your {thing} was sent to {a} people.",
        "Your {thing} has now been deleted.",
        "The {thing} that you have asked for is no longer in use.",
        "There is no {thing} with this {thing}.",
        "You have {e} new messages and {d} old ones.",
        "You have no new messages in your {thing}.",
        "First message, received on {day} at {d} {e} from {a} {b} {c} {a}.",
        "There are currently {d} callers in the {thing}.",
        "You are number {d} in line, and somebody will be with you in about {e} minutes.",
        "Thank you for waiting. All of our agents are still helping other customers.",
        "Please hold the line while we look for the {thing}.",
        "Please wait while I connect you to the {thing}.",
        "After the tone, please record your {thing}, then hang up or press {key} to {wish}.",
        "Please leave your {thing} after the beep.",
        "Nobody is here to answer your {thing} right now.",
        "The person at extension {a} {b} {c} {d} is on the phone.",
        "Welcome to the {thing} of the company. How may I direct your call?",
        "Would you like to {wish}? If so, press {key}.",
        "Do you want to {wish} or to {wish}?",
        "This {thing} is being recorded by the {thing}.",
        "The {thing} will begin as soon as the {thing} arrives.",
        "The {thing} is full.",
        "You are now the only one in this {thing}.",
        "You have entered {a}, {b}, {c}, {d}. If that is right, press {key}.",
        "Today is {day}. It is {d} o'clock and {e} minutes.",
        "It is {day}, {month} the {d}th, at {d} thirty in the afternoon.",
        "The temperature is {e} degrees and the wind comes from the west at {d} miles an hour.",
        "Your {thing} must have at least {a} digits.",
        "Goodbye, and thank you for your {thing}.",
        "You may hang up now, or stay on the line to {wish}.",
        "An error has occurred while we tried to {wish}. Please ask your {thing} for help.",
        "We are unable to {wish} because the {thing} does not answer.",
        "Please spell the {thing} with the letters on your keypad. Use the {key} key for Q and Z.",
        "The {thing} is turned off. To turn it on again, press {key}.",
        "Your call may cost {e} cents a minute.",
        "{a}, {b}, {c}, {d}, {e}, {f}.",
        "I have placed the {thing} in the {thing}.",
        "Visit our website at www dot example dot com for more about the {thing}.",
    ],
    "fr": [
        "Pour {wish}, appuyez sur le {key}.",
        "Si vous préférez {wish}, composez le {key} maintenant.",
        "Faites le {key} pour {wish}, ou le {key} pour {wish}.",
        "Vous pouvez {wish} à tout moment en appuyant sur la touche {key}.",
        "Veuillez composer le numéro, puis appuyez sur la touche {key}.",
        "Veuillez saisir votre {thing}, suivi de la touche {key}.",
        "Ce {thing} n'est pas valable. Veuillez recommencer.",
        "Désolé, aucun {thing} ne correspond à ce nom.",
        "Désolé, votre {thing} n'a pas pu être sauvegardé.",
        "Le {thing} a été modifié.",
        "Votre {thing} a été envoyé à {a} personnes.",
        "Votre {thing} est maintenant supprimé.",
        "Le {thing} que vous avez demandé n'est plus attribué.",
        "Vous avez {e} nouveaux messages et {d} anciens.",
        "Vous n'avez aucun nouveau {thing}.",
        "Premier message, reçu {day} à {d} heures {e}.",
        "Il y a actuellement {d} personnes dans cette conférence.",
        "Merci de patienter. Tous nos conseillers sont en ligne avec d'autres clients.",
        "Ne quittez pas, nous recherchons votre {thing}.",
        "Veuillez patienter pendant que nous vous mettons en relation avec le {thing}.",
        "Après le signal sonore, enregistrez votre {thing}, puis raccrochez ou faites le {key}.",
        "Personne ne peut répondre à votre appel pour l'instant.",
        "Le poste {a} {b} {c} {d} est déjà en ligne.",
        "Bienvenue au {thing}. Que puis-je faire pour vous ?",
        "Voulez-vous {wish} ? Si oui, appuyez sur le {key}.",
        "Cet {thing} est enregistré.",
        "Votre {thing} est plein.",
        "Vous êtes maintenant seul dans la conférence.",
        "Nous sommes {day}, il est {d} heures {e}.",
        "La température est de {e} degrés et le vent souffle à {d} kilomètres à l'heure.",
        "Votre {thing} doit avoir au moins {a} chiffres.",
        "Au revoir, et merci de votre {thing}.",
        "Une erreur s'est produite. Veuillez contacter votre {thing}.",
        "Impossible de {wish}, car le {thing} ne répond pas.",
        "{a}, {b}, {c}, {d}, {e}, {f}.",
        "L'{thing} est désactivé. Pour l'activer de nouveau, appuyez sur le {key}.",
    ],
    "de": [
        "Um {wish}, drücken Sie die {key}.",
        "Wenn Sie lieber wünschen, {wish}, wählen Sie jetzt die {key}.",
        "Bitte geben Sie die {thing} ein.",
        "Diese {thing} ist ungültig. Bitte versuchen Sie es noch einmal.",
        "Sie haben {e} neue Nachrichten und {d} alte.",
        "Bitte warten Sie, alle Mitarbeiter sind im Gespräch.",
        "Ihre {thing} wurde gelöscht.",
        "Es ist {day}, {d} Uhr {e}.",
        "Auf Wiederhören, und danke für Ihren Anruf.",
        "{a}, {b}, {c}, {d}, {e}, {f}.",
    ],
}

_NUMBERED = {
    "en": [
        "Dial {a} {b} {c} to hear the news again.",
        "The train to London leaves at {d} fifteen from platform {a}.",
        "There are {d} people waiting before you, and it will take about {e} minutes.",
        "My telephone number is {a} {b} {c}, {c} {a} {b}.",
        "That is {d} point {a}, which is less than {e}.",
        "If this is not what you wanted, choose {a}, or stay on the line for help.",
        "Between {e} and {d} they sold {f} of them.",
    ],
    "fr": [
        "Composez le {a} {b} {c} pour écouter les nouvelles une seconde fois.",
        "Le train de Lyon part à {d} heures quinze, voie {a}.",
        "Il y a {d} personnes avant vous, ce qui prendra environ {e} minutes.",
        "Mon numéro de téléphone est le {a} {b} {c}, {c} {a} {b}.",
        "Cela fait {d} virgule {a}, ce qui est moins que {e}.",
        "Si ce n'est pas votre choix, faites le {a}, ou restez en ligne pour parler à quelqu'un.",
        "Entre {e} et {d}, ils en ont vendu {f}.",
    ],
    "de": [
        "Wählen Sie {a} {b} {c}, um die Nachrichten noch einmal zu hören.",
        "Der Zug nach Hamburg fährt um {d} Uhr fünfzehn von Gleis {a}.",
        "Vor Ihnen warten {d} Leute, das dauert etwa {e} Minuten.",
        "Meine Telefonnummer ist {a} {b} {c}, {c} {a} {b}.",
        "Das sind {d} Komma {a}, also weniger als {e}.",
        "Wenn Sie etwas anderes wollten, nehmen Sie die {a}, oder bleiben Sie am Apparat.",
        "Zwischen {e} und {d} haben sie {f} davon verkauft.",
    ],
}

_DAYS = {
    "en": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "fr": "lundi mardi mercredi jeudi vendredi samedi dimanche".split(),
    "de": "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag".split(),
}
_MONTHS = (
    "January February March April May June July August September October November December".split()
)


def made_up(language: str, dice: random.Random) -> str:
    """A sentence."""
    line = dice.choice(_LINES[language] + _NUMBERED[language])
    numbers = {name: dice.randint(0, 9) for name in "abc"}
    numbers |= {"d": dice.randint(2, 24), "e": dice.randint(10, 99), "f": dice.randint(100, 999)}
    words = {
        "key": _list(_KEYS[language]),
        "wish": _list(_WISHES[language]),
        "thing": _list(_THINGS[language]),
        "day": _DAYS[language],
        "month": _MONTHS,
    }
    for name, choices in words.items():
        while f"{{{name}}}" in line:
            line = line.replace(f"{{{name}}}", dice.choice(choices), 1)
    return line.format(**numbers)


def _list(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";")]
